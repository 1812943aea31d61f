"""What any package could use: atomic files, field checks, tables, messages. Nothing here knows LoRA."""
