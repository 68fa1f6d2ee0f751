"""Programs around the package: reproductions of papers, benchmarks, checks and makers of files."""
