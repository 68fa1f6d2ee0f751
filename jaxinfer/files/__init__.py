"""Files that come with the package, digests of those that runs name, and lines of JSON."""
