"""Starts things: entry scripts, presets and DeepSpeed configurations. No logic of its own."""
