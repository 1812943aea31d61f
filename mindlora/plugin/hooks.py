"""Brings all of mindlora into MindFormers' registry: the PET type, the train step and the callbacks."""
from mindlora.plugin import callbacks, pet, wrapper  # noqa: F401  importing registers their classes

pet.register()
