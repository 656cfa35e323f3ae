"""What lying gains in the auction: settings, rounding rules, one auction, many rounds, and the figure."""
