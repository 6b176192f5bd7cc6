"""Every name of TensorFlow in the five tutorials, as they write it: what docs/from-tensorflow.md has to answer for."""


def words(text: str) -> list[str]:
    return text.split()


NAMES = words("""
tf.ConfigProto tf.FixedLenFeature tf.Graph tf.Session tf.Variable tf.add_n tf.app.flags tf.app.flags.DEFINE_integer
tf.app.flags.DEFINE_string tf.app.flags.FLAGS tf.app.run tf.argmax tf.cast tf.concat tf.constant
tf.constant_initializer tf.contrib.layers.l2_regularizer tf.control_dependencies tf.data.TFRecordDataset tf.decode_raw
tf.device tf.equal tf.expand_dims tf.float32 tf.get_collection tf.get_variable tf.get_variable_scope
tf.global_variables_initializer tf.group tf.int32 tf.int64 tf.matmul tf.merge_all_summaries
tf.moving_average_variables tf.name_scope tf.nn.softmax_cross_entropy_with_logits
tf.nn.sparse_softmax_cross_entropy_with_logits tf.no_op tf.parse_single_example tf.placeholder tf.random_normal
tf.reduce_mean tf.reshape tf.string tf.summary.FileWriter tf.summary.histogram tf.summary.merge_all
tf.train.ClusterSpec tf.train.Coordinator tf.train.ExponentialMovingAverage tf.train.GradientDescentOptimizer
tf.train.MonitoredTrainingSession tf.train.Saver tf.train.Server tf.train.Server.create_local_server
tf.train.StopAtStepHook tf.train.Supervisor tf.train.SyncReplicasOptimizer tf.train.exponential_decay
tf.train.get_or_create_global_step tf.train.replica_device_setter tf.train.start_queue_runners
tf.trainable_variables tf.uint8 tf.variable_scope
""")

METHODS = words("""
server.join server.target sv.prepare_or_wait_for_session sv.should_stop sv.start_queue_runners sv.stop
sess.run sess.graph mon_sess.run mon_sess.should_stop mts.run init.run
opt.minimize opt.compute_gradients opt.apply_gradients opt.make_session_run_hook opt.get_chief_queue_runner
opt.get_init_tokens_op variable_averages.apply saver.save summary_writer.add_summary
dataset.map dataset.shuffle dataset.repeat dataset.batch dataset.make_one_shot_iterator iterator.get_next
coord.request_stop coord.join input_data.read_data_sets mnist.train.next_batch mnist.train.num_examples
mnist.test.images mnist.test.labels mnist_inference.inference readdata.get_batch
""")

FLAGS = words("--job_name --task_id --task_index --ps_hosts --ps_host --worker_hosts --issync --logdir")

ARGUMENTS = words("""
is_chief logdir init_op summary_op saver global_step save_model_secs save_summaries_secs recovery_wait_secs
master checkpoint_dir hooks save_checkpoint_secs config allow_soft_placement log_device_placement
per_process_gpu_memory_fraction replicas_to_aggregate total_num_replicas worker_device cluster last_step feed_dict
one_hot trainable num_epochs buffer_size
""")
