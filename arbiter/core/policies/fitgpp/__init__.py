"""FitGpp and its baselines: jobs of class batch make room for interactive apps."""
