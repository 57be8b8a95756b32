"""Settings for generate() that transformers reads and then refuses to save."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
"""What other settings depend on."""


def make_savable(generation: GenerationConfig) -> str | None:
    """Reset the settings that do nothing, such as a temperature without do_sample, in place.

    transformers loads them with a warning, and save_pretrained refuses them.

    Returns:
        What was reset, in words; None where nothing was.
    """
    modes = {name: getattr(generation, name) for name in _MODES if hasattr(generation, name)}
    settings = generation.to_diff_dict()
    unused = [name for name in settings if hasattr(generation, name) and _refused(modes | {name: settings[name]})]
    for name in unused:
        setattr(generation, name, getattr(GenerationConfig(), name, None))
    if not unused:
        return None
    return (
        f"generation_config: {', '.join(f'{name} {settings[name]}' for name in unused)} had no effect, and is left out"
    )


def _refused(settings: dict[str, Any]) -> bool:
    """Return whether transformers would not save these settings beside its defaults."""
    config = GenerationConfig()
    vars(config).update(settings)
    try:
        config.validate(strict=True)
    except ValueError:
        return True
    return False
