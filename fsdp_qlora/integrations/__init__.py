"""Other trainers on this engine. Nothing in the rest of the package imports from here.

Each module needs the library that it is named after, and is imported by its own name:

    from fsdp_qlora.integrations.trl import DPOTrainer

Modules, each importing only from those before it: arguments, peft, states,
accelerate, streamed, reference_pass, checkpoints, transformers, trl, fabric.
"""
