"""Between texts and token ids: tokenizer, growing text, conversations, prompts, and a model's default sampling."""
