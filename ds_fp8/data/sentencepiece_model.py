"""A sentencepiece model file as a fast Hugging Face tokenizer with the same ids."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from ds_fp8.config.errors import UserError

SPACE = "▁"
UNIGRAM_MODEL, BPE_MODEL = 1, 2
CONTROL_PIECE, USER_DEFINED_PIECE = 3, 4


def from_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer stored at `path`; its special tokens are the model's control pieces.

    Raises:
        UserError: With the key data.tokenizer: the file is not a sentencepiece model, or one of words or characters.
    """
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        model.Clear()
    trainer = model.trainer_spec
    if not model.pieces or trainer.model_type not in (UNIGRAM_MODEL, BPE_MODEL):
        raise UserError(
            f"{path} is not a sentencepiece model of type BPE or unigram",
            key="data.tokenizer",
            remedy="give a .model file written by spm_train with --model_type=bpe or unigram",
        )
    tokenizer = Tokenizer(_subword_model(model))
    # Behind the normaliser, which would otherwise see user-defined pieces such as a line break.
    tokenizer.add_tokens(
        [
            AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL_PIECE)
            for piece in model.pieces
            if piece.type in (CONTROL_PIECE, USER_DEFINED_PIECE)
        ]
    )
    tokenizer.normalizer = _normalizer(model.normalizer_spec)
    # Sentencepiece puts a space before the text, which decoding has to take away again.
    prefix = model.normalizer_spec.add_dummy_prefix
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = {
        "bos_token": (trainer.bos_id, trainer.bos_piece),
        "eos_token": (trainer.eos_id, trainer.eos_piece),
        "pad_token": (trainer.pad_id, trainer.pad_piece),
        "unk_token": (trainer.unk_id, trainer.unk_piece),
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{role: piece for role, (index, piece) in special.items() if index >= 0},
    )


def _subword_model(model: sentencepiece_model_pb2.ModelProto) -> BPE | Unigram:
    trainer = model.trainer_spec
    if trainer.model_type == UNIGRAM_MODEL:
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        return Unigram(pieces, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
    return BPE(
        vocabulary,
        _merges(model, vocabulary),
        unk_token=trainer.unk_piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _merges(model: sentencepiece_model_pb2.ModelProto, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return every way to put a piece together from two, the best-scored piece first.

    Sentencepiece keeps scores only.
    """
    # In BPE models scores fall in the order of the merges.
    pieces = sorted(model.pieces, key=lambda piece: -piece.score)
    return [
        (piece.piece[:cut], piece.piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece.piece))
        if piece.piece[:cut] in vocabulary and piece.piece[cut:] in vocabulary
    ]


def _normalizer(spec: sentencepiece_model_pb2.NormalizerSpec) -> normalizers.Sequence:
    steps = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # A space that stands in front already serves as the prefix that Metaspace would add.
        steps += [
            normalizers.Strip(left=not spec.add_dummy_prefix, right=True),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    return normalizers.Sequence(steps)
