import logging

# It warns of every 8-bit product in fp32, and, when peft imports it, of an optional kernel that isn't there.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
