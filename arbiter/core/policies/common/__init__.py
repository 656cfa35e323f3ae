"""What several families of policies share."""
