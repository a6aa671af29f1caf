"""From logits to a request's next tokens."""
