"""Which tokens of a conversation carry loss."""

import functools
import json
import signal

import datasets
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_fp8.data import DataConfig, build_data
from ds_fp8.data import chat as module
from ds_fp8.data.chat import CHATML_TEMPLATE, CHATML_TOKENS, IGNORED, Chat, stop_tokens, tokenize_chats
from ds_fp8.data.sources import read_examples
from ds_fp8.data.stage import describe
from tests.corpus import CHATS, MAKE
from tests.refusals import refused

CHAT = [
    {"role": "system", "content": "Show your steps."},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "Now add. 4 + 3 = 7."},
    {"role": "user", "content": "And 2 less?"},
    {"role": "assistant", "content": "5."},
]
# Without {% generation %}, so that the assistant's turns must be found by comparing prefixes.
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_MARKERS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def with_template(tokenizer):
    own = tokenizer.chat_template

    def use(template):
        tokenizer.chat_template = template or own
        return tokenizer

    yield use
    tokenizer.chat_template = own


def tokenize_chat(tokenizer, chat):
    return tokenize_chats(tokenizer, [chat if isinstance(chat, Chat) else Chat(chat)])[0][:2]


def _spans(tokenizer, labels):
    """The stretches of tokens that carry loss, as text."""
    spans, current = [], []
    for label in [*labels, IGNORED]:
        if label != IGNORED:
            current.append(label)
        elif current:
            spans.append(tokenizer.decode(current))
            current = []
    return spans


@pytest.mark.parametrize("template", [None, PLAIN_CHATML])
def test_loss_falls_on_the_assistants_words_and_their_end(template, with_template):
    tokenizer = with_template(template)
    ids, labels = tokenize_chat(tokenizer, CHAT)
    assert len(ids) == len(labels)
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nShow your steps.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 more?<|im_end|>\n"
        "<|im_start|>assistant\nNow add. 4 + 3 = 7.<|im_end|>\n"
        "<|im_start|>user\nAnd 2 less?<|im_end|>\n"
        "<|im_start|>assistant\n5.<|im_end|>\n"
    )
    assert _spans(tokenizer, labels) == ["Now add. 4 + 3 = 7.<|im_end|>", "5.<|im_end|>"]


FIRST = [{"role": "assistant", "content": "5."}, *CHAT[1:3]]
WEIGHTED = [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
SPANS = [  # template, conversation, what carries loss
    (
        WITHOUT_MARKERS,
        CHAT,
        [" Now add. 4 + 3 = 7.\n", " 5.\n"],
    ),  # " Now" is one token, begun by the prompt's last space
    (None, FIRST, ["5.<|im_end|>", "Now add. 4 + 3 = 7.<|im_end|>"]),
    *((template, CHAT[:2], []) for template in (None, PLAIN_CHATML)),
    *((template, WEIGHTED, ["5.<|im_end|>"]) for template in (None, PLAIN_CHATML)),
]


@pytest.mark.parametrize(("template", "chat", "spans"), SPANS)
def test_what_carries_loss(template, chat, spans, with_template):
    tokenizer = with_template(template)
    assert _spans(tokenizer, tokenize_chat(tokenizer, chat)[1]) == spans


# As R1's, which opens thoughts that turns do not have
OPENS = PLAIN_CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [
        (PLAIN_CHATML, FIRST, "begins with an assistant turn"),
        (FORGETFUL, CHAT, "turn 3 when the conversation goes on"),
        (OPENS, CHAT, r"turn 3 that its own prompt begins, which ends in '.*<think>"),
    ],
)
def test_templates_that_do_not_show_what_carries_loss_are_refused(template, chat, words, with_template):
    with refused(words, "data.tokenizer") as error:
        tokenize_chat(with_template(template), chat)
    assert "generation" in error.value.remedy


def test_both_methods_agree_on_the_corpus(with_template):
    chats = [Chat(messages) for messages in MAKE["chats"](60, mixed=True)]
    marked = tokenize_chats(with_template(None), chats)
    assert marked == tokenize_chats(with_template(PLAIN_CHATML), chats)
    assert [chat[:2] for chat in marked] == [tokenize_chat(with_template(None), chat) for chat in chats]
    assert all(chat.ends for chat in marked)


def test_prompt_for_generation_is_a_prefix_of_the_conversation(tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    ids, labels = tokenize_chat(tokenizer, CHAT)
    assert ids[: len(prompt)] == prompt
    assert labels[: len(prompt)] == [IGNORED] * len(prompt)
    assert labels[len(prompt)] != IGNORED


def test_a_chat_ends_where_a_turn_does_and_a_document_where_text_does(tokenizer):
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    assert stop_tokens(tokenizer, chat=True) == [end_of_turn, end_of_text]
    assert stop_tokens(tokenizer, chat=False) == [end_of_text]


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{% if %}",
        "{{ raise_exception('no system turns') }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% generation %}{{ messages[0]['content'].__class__.__mro__ }}{% endgeneration %}",
    ],
)
def test_a_template_that_fails_is_named(template, with_template):
    with refused("the chat template fails", "data.chat_template"):
        tokenize_chat(with_template(template), CHAT)


def test_a_template_without_an_assistant_ends_answers_at_the_end_of_text(with_template):
    silent = with_template("{{ messages[0]['content'] }}")
    assert stop_tokens(silent, chat=True) == [silent.eos_token_id]


@pytest.mark.parametrize("answer", ["{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}"])
def test_a_template_that_closes_no_turn_ends_answers_at_the_end_of_text(answer, with_template):
    """And not at whatever token an answer of the template's trial ends in."""
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + answer + "{% else %}"
    template += "{{ 'Q: ' + m['content'] }}{% endif %}{% endfor %}"
    open_ended = with_template(template)
    assert stop_tokens(open_ended, chat=True) == [open_ended.eos_token_id]


THOUGHT = "<think>2 and 2</think>\n\nIt is 4."
CALL = {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": '{"city": null}'}}
OPEN_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + CLOSE }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def _byte_tokenizer(template, added, special):
    """Tokens of a byte each, and those added: special ones, which a role names or not, and plain ones."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end_of_text|>", chat_template=template)
    tokenizer.add_tokens([AddedToken(token, special=special != "plain") for token in added])
    if special == "named":
        tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    return tokenizer


@pytest.mark.parametrize("special", ["plain", "unnamed", "named"])
@pytest.mark.parametrize("thoughts", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("close", ["", "\n", "<|eot|>", "<|eot|>\n", "<|eot|> \n\n", "\nEND"])
def test_loss_ends_where_what_closes_the_turn_ends(close, thoughts, special, monkeypatch):
    """Whichever of the tokens are special ones, those of the answer among them."""
    tokenizer = _byte_tokenizer(
        OPEN_TEMPLATE.replace("CLOSE", repr(close)), ("[user]", "[assistant]", "<|eot|>"), special
    )
    if thoughts:
        tokenizer.add_special_tokens({"additional_special_tokens": list(thoughts)})
    for answer in (THOUGHT, "<think>only</think>", "four\n", "<|eot|>", ""):
        chat = [CHAT[1], {"role": "assistant", "content": answer}, CHAT[3], {"role": "assistant", "content": THOUGHT}]
        said = close.rstrip() if close.strip() else close
        expected = [turn for turn in (answer + said, THOUGHT + said) if turn]
        assert _spans(tokenizer, tokenize_chat(tokenizer, chat)[1]) == expected


@pytest.mark.parametrize(("mark", "ends"), [("{{ m['content'] + '<|im_end|>' }}", True), ("{{ m['content'] }}", False)])
def test_marks_that_leave_out_the_end_of_a_turn_are_counted(mark, ends, with_template, tmp_path):
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}" + mark + "{% endgeneration %}"
    template += "" if ends else "{{ '<|im_end|>' }}"
    tokenizer = with_template(template + "{{ '\n' }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}")
    assert [chat.ends for chat in tokenize_chats(tokenizer, [Chat(CHAT), Chat(CHAT[:2])])] == [ends, True]
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT}))
    data = build_data(DataConfig(**CHATS | {"path": str(tmp_path / "own.jsonl")}), tokenizer)
    said = []
    describe(data.report, said.append)
    assert data.report["train"]["open_ends"] == (0 if ends else 2)
    assert ("2 of all chats end in a turn whose end the template leaves without loss" in said[0]) is not ends


CALLS = {  # how templates write calls of tools
    "as objects": "{{ m['content'] or '' }}{% for c in m['tool_calls'] %}<call>{{ c['function'] | tojson }}{% endfor %}",  # noqa: E501
    "None before": "{% if m['content'] is none %}{% for c in m['tool_calls'] %}<call>"
    "{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}",
    "text added": "{{ m['content'] + '' }}{% for c in m['tool_calls'] %}<call>{{ c['function'] | tojson }}{% endfor %}",
    "None written": "{{ m['content'] }}{% for c in m['tool_calls'] %}<call>{{ c['function'] | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("kind", CALLS)
def test_files_of_openai_train(kind, with_template, tmp_path):
    """Null beside calls of tools, a null inside their arguments, lists of text parts, weights."""
    rows = [
        [
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "today?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "content": "rain"},
            {"role": "assistant", "content": "Rain.", "weight": 0},
            {"role": "user", "content": "Sure?", "name": "Ann"},
            {"role": "assistant", "content": "Yes."},
        ]
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['tool_calls'] %}" + CALLS[kind]
    template += "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = with_template(template)
    (chat,) = read_examples(DataConfig(path=str(tmp_path / "own.jsonl"), format="chat"))
    ids, labels = tokenize_chat(tokenizer, chat)
    first, last = _spans(tokenizer, labels)
    assert all(part in first for part in ("<call>", "weather", '"city": null'))
    assert last == "Yes.<|im_end|>"
    text = tokenizer.decode(ids)
    assert all(part in text for part in ("Weather\ntoday?", "Rain."))
    assert not any(part in text for part in ("None", '\\"'))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "x"}}}}}]
AGENT = (  # Qwen3's shape: tools in a first turn, calls, thoughts that an argument switches off
    "{%- if enable_thinking is false %}{{- '/no_think' }}{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for t in tools %}{{- t | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}GENERATION{{- m.reasoning_content or '' }}{{- m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}{{- '<|im_end|>' }}END"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
UNMARKED = AGENT.replace("GENERATION", "").replace("END", "")
MARKED = AGENT.replace("GENERATION", "{%- generation %}").replace("END", "{%- endgeneration %}")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", "text"])
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_tools_and_arguments_are_rendered_as_transformers_renders_them(template, ending, with_template, tmp_path):
    tokenizer = with_template(template)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Ask."},
        {"role": "tool", "content": "rain", "name": "weather"},
        {"role": "assistant", "content": "Rain."},
    ]
    rows = [
        {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "id": 1},
        {"messages": CHAT, "tools": None, "chat_template_kwargs": None, "id": 2},
    ]
    expected = [
        tokenizer.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            return_dict=True,
            return_assistant_tokens_mask=template == MARKED,
            **(row["chat_template_kwargs"] or {}),
        )
        for row in rows
    ]
    if ending == "text":  # as columns of many tables have it
        rows = [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    file = tmp_path / f"own{'.jsonl' if ending == 'text' else ending}"
    if ending == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tokenize_chats(tokenizer, list(read_examples(DataConfig(path=str(file), format="chat"))))
    assert [chat.ids for chat in found] == [each["input_ids"] for each in expected]
    assert "<tools>" in tokenizer.decode(found[0].ids)
    if template == MARKED:
        masks = [[int(label != IGNORED) for label in chat.labels] for chat in found]
        assert masks == [each["assistant_masks"] for each in expected]
    else:
        spans = _spans(tokenizer, found[0].labels)
        assert spans == ['Ask.{"name": "weather", "arguments": {"city": "Rome"}}<|im_end|>', "Rain.<|im_end|>"]


@pytest.mark.parametrize(
    ("arguments", "turn", "words"),
    [
        ({"tools": TOOLS}, {}, "leaves out tools"),
        ({"enable_thinking": False}, {}, "leaves out enable_thinking"),
        ({}, {"reasoning_content": "4 + 3"}, "leaves out reasoning_content"),
        ({}, {"tool_calls": [CALL]}, "leaves out"),
    ],
)
@pytest.mark.parametrize("template", [None, PLAIN_CHATML, "{{ 'tools' }}" + PLAIN_CHATML])
def test_what_a_template_leaves_out_is_refused_by_row(template, arguments, turn, words, with_template):
    chat = Chat([CHAT[1], {**CHAT[2], **turn}], arguments, "row 3 of own.jsonl")
    if template and "tools" in template:
        words = words.replace("tools", '"weather" of tools')
    with refused(f"row 3 of own.jsonl: .* {words}", "data.chat_template") as caught:
        tokenize_chat(with_template(template), chat)
    assert ("ChatML" in str(caught.value)) is (template is None)
    empty = Chat([CHAT[1], {**CHAT[2], "tool_calls": []}], {"tools": []})
    assert tokenize_chat(with_template(template), empty) == tokenize_chat(with_template(template), CHAT[1:3])


PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] + ';' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "text"), [(PARTS, "One;two;"), (PLAIN_CHATML, "user\nOne\ntwo")])
def test_parts_of_text_go_to_templates_that_take_them(template, text, with_template):
    tokenizer = with_template(template)
    parts = [[{"type": "text", "text": each} for each in said] for said in (["One", "two"], ["Three"])]
    chat = [{"role": "user", "content": parts[0]}, {"role": "assistant", "content": parts[1]}]
    ids, labels = tokenize_chat(tokenizer, chat)
    assert text in tokenizer.decode(ids)
    assert "Three" in _spans(tokenizer, labels)[0]
    if template == PARTS:
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_a_templates_own_error_comes_before_what_it_leaves_out(with_template):
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    with refused("TemplateSyntaxError"):
        tokenize_chat(with_template("{% for %}"), chat)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_ended(with_template, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    timers = signal.getitimer(signal.ITIMER_PROF), signal.getsignal(signal.SIGPROF)
    with refused(r"row 7 of x: the chat template fails: no end after 0\.2 s"):
        tokenize_chat(with_template(LOOPS), Chat(CHAT, where="row 7 of x"))
    assert (signal.getitimer(signal.ITIMER_PROF), signal.getsignal(signal.SIGPROF)) == timers


DEEP = functools.reduce(lambda inner, _: [inner], range(3000), [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"content": "half \ud800"}, "half a surrogate pair"),
        ({"content": "x" * 3000}, "characters, 2,000 are allowed"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}, "RecursionError"),
    ],
)
def test_a_row_that_is_no_text_for_a_tokenizer_is_named(change, words, with_template, monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 2000)
    with refused(f"row 9 of x:? .*{words}"):
        tokenize_chat(with_template(MARKED), Chat([CHAT[1], {**CHAT[2], **change}], where="row 9 of x"))


def test_arguments_that_are_no_json_are_the_text_that_they_are(with_template):
    """As transformers has it, whether they are too deep to be read or none at all."""
    for text in ("[" * 3000, "city: Rome"):
        call = {**CHAT[2], "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        ids, _ = tokenize_chat(with_template(MARKED), [CHAT[1], call])
        assert text in with_template(MARKED).decode(ids)


@pytest.fixture(scope="module")
def dropping_tokenizer():
    """One that drops spaces, and what it has no word for, before and behind words, as sentencepiece's models do."""
    words = [*CHATML_TOKENS, "</s>", "quick", "lazy", "system", "user", "assistant", "Show", "steps", "And", "more"]
    model = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="</s>"))
    model.normalizer = normalizers.Replace(Regex(r"[^\w\s]"), "")
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", chat_template=CHATML_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": words[:2]})
    return tokenizer


@pytest.mark.parametrize("answer", ["lazy", " lazy", "\n\nlazy", "\u200blazy", " ", "\n\n", ""])
def test_turns_after_an_answer_that_begins_with_dropped_characters_carry_loss(answer, dropping_tokenizer):
    chat = [*CHAT[:2], {"role": "assistant", "content": answer}, CHAT[3], {"role": "assistant", "content": "quick"}]
    _, labels = tokenize_chat(dropping_tokenizer, chat)
    spans = [span.replace(" ", "") for span in _spans(dropping_tokenizer, labels)]
    assert spans == [f"{answer.strip().strip(chr(0x200B))}<|im_end|>", "quick<|im_end|>"]


def test_every_byte_of_an_answers_last_letter_carries_loss(with_template):
    marked = "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    marked += "{% endgeneration %}{% else %}{{ 'Q: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    tokenizer = with_template(marked)
    chat = [CHAT[1], {"role": "assistant", "content": "Yes 😀"}, CHAT[3], {"role": "assistant", "content": "No 漢"}]
    assert [span.strip() for span in _spans(tokenizer, tokenize_chat(tokenizer, chat)[1])] == ["Yes 😀", "No 漢"]
