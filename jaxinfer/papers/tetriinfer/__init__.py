"""TetriInfer: sorted prompts, chunks, and decode instances chosen by predicted length."""
