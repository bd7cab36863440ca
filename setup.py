"""Packaging of Threestep: the packages `training` and `threestep`, the command, dependencies and extras.

The version is read from training/__init__.py as text, so that nothing is imported while a wheel is built.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    text = (HERE / "training" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('training/__init__.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


INSTALL_REQUIRES = [
    "torch>=2.11",
    "deepspeed>=0.19.8",
    "transformers>=5.19",
    "datasets",
    "accelerate",
    "tensorboard",
    "peft",
    "safetensors",
    "tqdm",
    "matplotlib",
    "mpld3",  # carries D3, which the report's pages hold; nothing else of it is used
    "ninja",
    "pyyaml",
    "xxhash",  # which datasets needs too
    "pydantic>=2",  # which deepspeed needs too
]
TEST_REQUIRES = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "openai", "gguf", "ruff", "mypy"]
# The site of the documentation (scripts/docs.sh). Sphinx 9 asks for Python 3.11.
DOCS_REQUIRES = [f'{name}; python_version >= "3.11"' for name in ("sphinx>=9", "furo", "myst-parser>=5")]
# What scripts/build_release.sh, scripts/lock.py and the scan for known vulnerabilities run.
RELEASE_REQUIRES = [
    "build", "cyclonedx-bom", "packaging", "pip>=26.1", "pip-audit", "setuptools", "twine", "uv", "wheel",
]  # fmt: skip

setup(
    name="threestep",
    version=read_version(),
    description="Supervised fine-tuning, a pairwise reward model and PPO on DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The tests of plugins, in their folders, are no packages.
    packages=find_packages(include=["training", "training.*", "threestep", "threestep.*"]),
    entry_points={"console_scripts": ["threestep = threestep.command:main"]},
    package_data={
        "": ["configs/*.yaml", "README.md"],  # of whatever package has them
        "training": ["py.typed"],
        "threestep.plugins.explain": ["*.js"],
        "threestep.plugins.report.pages": ["*.js"],
        "training.utils.plugins": ["known_plugins.txt"],
        "threestep": ["py.typed"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "test": TEST_REQUIRES,
        "dev": TEST_REQUIRES,
        "docs": DOCS_REQUIRES,
        "vllm": ["vllm==0.32.*"],  # the rollout engine reaches into it; 0.33 wants torch 2.14
        "liger": ['liger-kernel>=0.8.5; sys_platform == "linux"'],  # fused kernels, on CUDA
        "vision": ["pillow", "torchvision"],
        "wandb": ["wandb"],
        "trackio": ["trackio"],
        # Without the server, which asks for a pyarrow of before 26.
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic"],
        "web": ["gradio>=6"],
        "openenv": ["openenv>=0.10"],  # environments behind its servers
        "verifiers": ['verifiers==0.4.*; python_version >= "3.11"'],  # environments of its tasksets; wants openai < 3
        "gymnasium": ["gymnasium>=1"],  # environments of its games
        "tinker": ['tinker==0.38.*; python_version >= "3.11"'],  # the Tinker API's messages, and its client
        "harness": ['lm_eval>=0.4.13; python_version >= "3.11"'],  # tasks of lm-evaluation-harness
        "gguf": ["gguf>=0.19"],  # models in GGUF files
        "quantized": ["bitsandbytes>=0.50"],  # a CPU build is part of it
        "notebook": ["nbclient", "ipykernel"],  # executes the notebooks of examples/
        "release": RELEASE_REQUIRES,
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
