"""Which folders the wheel holds; all else is in pyproject.toml, which has no words for a folder under another name.

The recipes lie beside the package, where people look for them. In a wheel they lie in it, as toolkit/_recipes: a folder
`recipes` in site-packages would take the place of somebody's own.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["toolkit*"]), "toolkit._recipes"],
    package_dir={"toolkit._recipes": "recipes"},
)
