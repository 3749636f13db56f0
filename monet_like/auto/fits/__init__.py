"""What fits on which card, without the card: a training step, predicted piece by piece."""
