"""FitGpp and its baselines: who makes room for interactive apps."""
