"""The report of one run or several, finished or not: an HTML page, an image, a CSV table."""
