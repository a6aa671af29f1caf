"""Training of the small model that ships as ``LLM("demo")``: corpus, tokenizer, data, model, optimiser, loop,
export."""
