"""What fits on which card, without the card: the steps of decoders, predicted block by block."""
