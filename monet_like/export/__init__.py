"""Plans for other people's machinery: as JSON, as policies of selective checkpointing."""
