"""The whole engine on one page, in plain PyTorch: :mod:`.dsa`. Nothing of the engine is imported here."""
