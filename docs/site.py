"""The site's parts that are written elsewhere: version and repository in the header, and ARCHITECTURE.md as a page."""

import os
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import demopt

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Puts version and repository into the header, and the architecture among the explanations."""
    config.site_name = f"demopt {demopt.__version__}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # where the workflow runs
        config.repo_url, config.repo_name = f"https://github.com/{repository}", repository
    config.nav[-1]["Explanation"].append("architecture.md")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the page, whose links are relative to the repository's root."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "architecture.md", content=text))
    return files
