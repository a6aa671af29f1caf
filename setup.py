"""The package, its dependencies and its command; tool settings are in pyproject.toml, exact pins in constraints.txt.

The import names are ``dsa_engine.kernels`` and ``dsa_engine.parallel``: the top-level folders of those names are
reached through symbolic links and are never installed as top-level packages.

``src/`` holds nothing but a link to the package. An editable install puts it on Python's path: so the package is found
there also in the folder that holds a clone named dsa_engine, and other folders of the clone are not found.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "dsa_engine"

# A checkout without symbolic links has small text files in their place, and would build half a package.
for link in (PACKAGE, PACKAGE / "kernels", PACKAGE / "parallel"):
    if not link.is_dir():
        raise SystemExit(
            f"{link} is not a folder: it should be a symbolic link; "
            "clone with symbolic links enabled (git config core.symlinks true)"
        )

# Its launcher. It comes as source only, to be built by the setuptools that there is: pip install --no-build-isolation.
DEEPSPEED = "deepspeed>=0.19"

# The HTTP server and its channel to the engine's process.
SERVE = [
    "fastapi>=0.132",
    "uvicorn>=0.30",
    "httptools>=0.6",
    "prometheus_client>=0.20",
    "pyzmq>=26",
    "msgspec>=0.19",
]


def version() -> str:
    text = (PACKAGE / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit('dsa_engine/version.py must hold a line like __version__ = "0.1.0"')
    return match.group(1)


def readme() -> str:
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


setup(
    name="dsa-engine",
    version=version(),
    description="Inference of models with DeepSeek Sparse Attention over very long contexts, on 1 to 64+ GPUs",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="the dsa_engine authors",
    license_expression="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir={"": "src"},
    packages=find_packages("src", include=["dsa_engine", "dsa_engine.*"]),
    package_data={
        "dsa_engine": ["py.typed", "demo_model/*"],
        "dsa_engine.kernels": ["cpu/*"],
        "dsa_engine.server": ["page/*"],
    },
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        "torch>=2.11",
        'triton>=3.6; platform_system == "Linux"',
        "safetensors>=0.8",
        "huggingface_hub>=1.0",
        "numpy>=1.26",
        "transformers>=5.11",  # the first with both deepseek_v32 and glm_moe_dsa
        "tqdm>=4.60",
        "llguidance>=1.9",  # grammars of structured outputs; 3 MB, needs nothing
    ],
    extras_require={
        "serve": SERVE,
        "plot": ["matplotlib"],
        "browser": ["playwright"],  # tests of the server's page, in a chromium that is installed apart
        "flash-attn": ["flash-attn"],
        "deepspeed": [DEEPSPEED],
        "test": [
            *SERVE,
            "httpx>=0.27",
            "openai",  # the client whose examples the server is tested with
            "vllm-router>=0.1.17",  # routes between two servers in a test
            "pytest>=9",
            "pytest-xdist>=3.8",
            "hypothesis",
            "jsonschema",  # answers with a schema are validated by it
            'compressed-tensors>=0.15; python_version >= "3.11"',  # what others write and read: an oracle
            DEEPSPEED,
            "matplotlib",
            "ruff",
            "mypy",
            "build",
            "setuptools>=77",
            "wheel",
        ],
    },
    entry_points={"console_scripts": ["dsa-engine = dsa_engine.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
