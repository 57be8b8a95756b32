"""The language-model head and its loss, without logits in memory."""
