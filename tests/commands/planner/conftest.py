"""The model whose deployments are planned."""

from __future__ import annotations

import pytest

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.from_dict(released_config("deepseek_v32"))
