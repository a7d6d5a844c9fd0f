"""`synth probe`: the fabric between running processes, measured and put into a topology."""
