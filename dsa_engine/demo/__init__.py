"""The built-in models: ``"demo"``, small and trained, and ``"demo-random"``, untrained; and random checkpoints."""

from dsa_engine.demo.random_model import demo_config, demo_files, demo_folder, trained_folder

__all__ = ["demo_config", "demo_files", "demo_folder", "trained_folder"]
