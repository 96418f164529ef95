"""The deterministic simulator: production stacks under replaced links, clock, compute and text."""
