"""Chat templates, which are untrusted programs of the model folder: rendering, the sandbox, and limits on values."""
