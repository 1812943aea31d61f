"""Prints what the extras of the installed mindlora require, without what mindlora itself requires.

python scripts/extra_requirements.py test,data
"""

import importlib.metadata
import sys

from packaging.requirements import Requirement

extras = sys.argv[1].split(",")
for line in importlib.metadata.requires("mindlora"):
    requirement = Requirement(line)
    if requirement.marker and any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
        requirement.marker = None
        print(requirement)
