"""Read, download, convert and push the files of models and datasets, on the Hub or in local folders."""
