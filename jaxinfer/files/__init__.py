"""Files that come with the package, digests of files that runs name, and lines of JSON."""
