r"""Train multi-token-prediction modules on a frozen target.

    accelerate launch training/train_mtp.py --config configs/drafters/fastmtp.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m

configs/drafters/fastmtp.yaml trains one module for all depths, configs/drafters/mtp.yaml one for
each. drafter.init=shipped starts from the modules in the target's own folder.
"""

from training.run import main

if __name__ == "__main__":
    main("mtp", "drafters/mtp.yaml", __doc__)
