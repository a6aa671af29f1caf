"""Training of the small model that ships as ``LLM("demo")``: corpus, documents, model, optimiser, loop,
export."""
