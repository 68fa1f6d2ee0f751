"""What a sharding layout costs before it runs: collectives, bytes and seconds."""
