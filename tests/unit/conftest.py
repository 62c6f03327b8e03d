"""What unit tests need besides what all tests do."""

import logging

# torch writes structured traces of every compilation to this logger, whether or not anybody listens: pytest would keep
# them and print thousands of lines with each failure.
logging.getLogger("torch.__trace").propagate = False
