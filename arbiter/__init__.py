"""The arbiter: owns every lease, runs the rounds, explains what it did."""
