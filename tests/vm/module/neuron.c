// SPDX-License-Identifier: GPL-2.0
/*
 * Stands for the driver of AWS Neuron chips in a virtual machine without any: the class neuron_device, with nodes
 * /dev/neuronN, the attributes core_count and connected_devices, and uevents, all made by a real kernel. Chips do
 * nothing; opening one succeeds as long as it is there, and keeps the module loaded, as with the real driver.
 *
 *	modprobe neuron chips=16 cores=2 major=0	major 0: the kernel chooses one
 *	echo 3 >/sys/module/neuron/parameters/remove	chip 3 is gone, whoever has it open
 *	echo 3 >/sys/module/neuron/parameters/add	chip 3 is back
 *
 * 16 chips are linked as a torus of 4 by 4, any other number as a ring.
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>

#define MOST_CHIPS 64

static uint chips = 16;
module_param(chips, uint, 0444);
static uint cores = 2;
module_param(cores, uint, 0444);
static uint major;
module_param(major, uint, 0444);

static struct class *neuron_class;
static struct cdev neuron_cdev;
static dev_t first;
static struct device *present[MOST_CHIPS];
static DEFINE_MUTEX(lock);
static bool ready;

static ssize_t core_count_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", cores);
}
static DEVICE_ATTR_RO(core_count);

static ssize_t connected_devices_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	uint i = MINOR(dev->devt);

	if (chips == 16) {
		uint row = i & ~3u, column = i & 3;

		return sysfs_emit(buf, "%u, %u, %u, %u\n", (i + 12) % 16, (i + 4) % 16,
				  row | ((column + 3) & 3), row | ((column + 1) & 3));
	}
	if (chips == 1)
		return sysfs_emit(buf, "\n");
	return sysfs_emit(buf, "%u, %u\n", (i + chips - 1) % chips, (i + 1) % chips);
}
static DEVICE_ATTR_RO(connected_devices);

static struct attribute *neuron_attrs[] = {
	&dev_attr_core_count.attr,
	&dev_attr_connected_devices.attr,
	NULL,
};
ATTRIBUTE_GROUPS(neuron);

static int neuron_open(struct inode *inode, struct file *file)
{
	return present[iminor(inode) % MOST_CHIPS] ? 0 : -ENXIO;
}

static const struct file_operations neuron_fops = {
	.owner = THIS_MODULE,
	.open = neuron_open,
};

/* Both are called with the lock held. */
static int add_chip(uint i)
{
	struct device *made;

	if (present[i])
		return -EEXIST;
	made = device_create(neuron_class, NULL, first + i, NULL, "neuron%u", i);
	if (IS_ERR(made))
		return PTR_ERR(made);
	present[i] = made;
	return 0;
}

static int remove_chip(uint i)
{
	if (!present[i])
		return -ENODEV;
	present[i] = NULL;
	device_destroy(neuron_class, first + i);
	return 0;
}

static int set_chip(const char *text, const struct kernel_param *param)
{
	uint i;
	int error = kstrtouint(text, 10, &i);

	if (error)
		return error;
	if (!ready || i >= chips)
		return -EINVAL;
	mutex_lock(&lock);
	error = param->arg ? add_chip(i) : remove_chip(i);
	mutex_unlock(&lock);
	return error;
}
static const struct kernel_param_ops chip_ops = { .set = set_chip };
module_param_cb(add, &chip_ops, &ready, 0200);
module_param_cb(remove, &chip_ops, NULL, 0200);

static void remove_all(void)
{
	uint i;

	for (i = 0; i < MOST_CHIPS; i++)
		remove_chip(i);
	class_destroy(neuron_class);
	cdev_del(&neuron_cdev);
	unregister_chrdev_region(first, MOST_CHIPS);
}

static int __init neuron_init(void)
{
	uint i;
	int error;

	if (!chips || chips > MOST_CHIPS)
		return -EINVAL;
	first = MKDEV(major, 0);
	error = major ? register_chrdev_region(first, MOST_CHIPS, "neuron")
		      : alloc_chrdev_region(&first, 0, MOST_CHIPS, "neuron");
	if (error)
		return error;
	cdev_init(&neuron_cdev, &neuron_fops);
	neuron_cdev.owner = THIS_MODULE;
	error = cdev_add(&neuron_cdev, first, MOST_CHIPS);
	if (error) {
		unregister_chrdev_region(first, MOST_CHIPS);
		return error;
	}
	neuron_class = class_create(THIS_MODULE, "neuron_device");
	if (IS_ERR(neuron_class)) {
		cdev_del(&neuron_cdev);
		unregister_chrdev_region(first, MOST_CHIPS);
		return PTR_ERR(neuron_class);
	}
	neuron_class->dev_groups = neuron_groups;
	for (i = 0; i < chips && !error; i++)
		error = add_chip(i);
	if (error)
		remove_all();
	else
		ready = true;
	return error;
}

static void __exit neuron_exit(void)
{
	remove_all();
}

module_init(neuron_init);
module_exit(neuron_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION("2.0-test");
MODULE_DESCRIPTION("Neuron chips of a test machine");
