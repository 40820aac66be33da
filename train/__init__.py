"""Training: fine-tuning and training from scratch of the model in `csa2_jax`.

    data         documents -> packed rows of tokens        losses, draft_loss   what is minimised
    parameters   which parameter is trained, and how       optimizer            Muon, AdamW, Sinkhorn-balanced momentum
    step         one update, compiled                      checkpoints, loop    runs that can be killed and resumed
    placement    runs on several devices                   recall               does the index learn to find things?

`python -m train --config configs/train_tiny.toml` runs all of it.
"""
