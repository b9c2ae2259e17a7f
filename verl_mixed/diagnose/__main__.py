"""`python3 -m verl_mixed.diagnose LOG...`, for hosts without packages."""

import sys

from verl_mixed.diagnose.diagnose import main

if __name__ == "__main__":
    sys.exit(main())
