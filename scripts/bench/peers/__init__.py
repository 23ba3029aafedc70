"""Other trainers of EAGLE drafters: their environments, and their models and losses on our rows."""
