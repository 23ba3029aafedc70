"""Which draft length serves fastest, from the acceptance length and the times of decoding steps."""
