"""Brings all of mindlora into MindFormers' registry: the PET type, the train step, the callbacks, LoRA+'s schedule."""

from mindlora.plugin import callbacks, lora_plus, pet, train_step  # noqa: F401  importing registers their classes

pet.register()
