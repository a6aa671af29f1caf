"""The forms of requests and answers of each endpoint, in OpenAI's API and vLLM's."""
