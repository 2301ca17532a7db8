"""Settings of every test session."""

import os

# Tests run tiny tensors: more threads would only wait for each other, and for other test processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
