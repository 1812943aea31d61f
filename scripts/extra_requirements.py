"""Prints the requirements of the installed mindlora's extras, without mindlora's own requirements.

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
