"""The matrices of a drafter in DeepSpeed's partitions, which the Muon optimizer makes whole."""
