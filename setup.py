"""The description for a package index: README.md with links to the repository. All else stands in setup.cfg."""

import configparser
import re
from pathlib import Path

from setuptools import setup

root = Path(__file__).parent
config = configparser.ConfigParser()
config.read(root / "setup.cfg")
pages = f"]({config['metadata']['url']}/blob/HEAD/"
text = (root / "README.md").read_text(encoding="utf-8")
setup(long_description=re.sub(r"\]\((?!\w+:)", pages, text), long_description_content_type="text/markdown")
