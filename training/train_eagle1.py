r"""Train an EAGLE-1 drafter on a frozen target; under dynamic growth it is EAGLE-2.

    accelerate launch training/train_eagle1.py --config configs/drafters/eagle1.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("eagle1", "drafters/eagle1.yaml", __doc__)
