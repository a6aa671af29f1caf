"""From logits to the next tokens of requests."""
