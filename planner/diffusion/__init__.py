"""Predict training steps of diffusers' diffusion transformers, from their ``config.json``.

A class is described by its forward pass on symbols, tensors without elements (tape.py). Weights,
FLOPs and memory follow from it. A new class is one file beside wan.py and a line in clip.py.
Nothing here needs diffusers.

    model, _ = load_transformer("wan2.1_14b")
    clip = Clip(frames=81, height=480, width=832)
    predict_clip(model, clip, ClipRun(gpus=8, batch=8), load_cluster("h100")).time
"""
